"""The released wheels of hosts that have some."""

#: Host and the distribution that the patch of its name is made for.
WHEELS = {
    "megatron-bridge": "megatron-bridge==0.6.2",
    "ms-swift": "ms-swift==4.6.0",
    "skyrl": "skyrl==0.4.0",
    "verl": "verl==0.9.1",
}
#: And what their trainers need beside what the extra ``hosts`` brings, in versions that fit them.
DOWNLOADS = {**WHEELS, "mcore-bridge": "mcore-bridge==1.6.5"}
