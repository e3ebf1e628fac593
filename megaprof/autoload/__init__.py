"""How megaprof comes into a trainer: ``install_hooks``, and what calls it without an edit."""

#: The hosts, by their names in ``patches/``: a package that is loaded if and only if the host runs,
#: and our module that describes it. A host that is built on another comes before it. No other list of the core's names
#: the module of one that is an extra.
HOSTS = {
    "slime": ("slime", "hosts.slime"),
    "verl": ("verl", "hosts.verl"),
    "skyrl": ("skyrl", "hosts.skyrl"),
    "ms-swift": ("swift", "hosts.ms_swift"),
    "megatron-bridge": ("megatron.bridge", "autoload.megatron_bridge"),
    "megatron-lm": ("megatron.training", "autoload.megatron_lm"),
}
