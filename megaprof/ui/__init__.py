"""The pages of `megaprof ui`: the captures and jobs below a directory, for a browser on this machine."""
