"""gRPC between the services: channels, links, the wire's codec, error statuses and the server every service runs."""
