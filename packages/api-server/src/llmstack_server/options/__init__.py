"""Options of the server, declared once, and the configuration made of them."""
