"""gRPC between the services: the wire's codec, links, error statuses and the server every service runs."""
