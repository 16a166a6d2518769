"""The parts of HTTP that all APIs share: errors, bodies, middleware, routes."""
