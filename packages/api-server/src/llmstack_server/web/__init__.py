"""What is HTTP and not any one API: errors, bodies, middleware, metrics, routes."""
