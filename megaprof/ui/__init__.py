"""The page behind `megaprof ui`: what lies below a directory, for a browser on this machine."""
