"""How megaprof comes into a trainer: ``install_hooks``, and what calls it without an edit."""
