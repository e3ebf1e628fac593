"""What to capture, when, on which ranks and with which tool: options, arguments, environment."""
