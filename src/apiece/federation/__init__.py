"""A real federation: clients on machines of their own, each with its data, and a server without any."""
