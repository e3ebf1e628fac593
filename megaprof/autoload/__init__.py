"""How megaprof comes into a trainer: ``install_hooks``, what calls it without an edit, and one file for each host."""
