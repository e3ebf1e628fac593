"""The commands' answers for an agent, through the Model Context Protocol."""
