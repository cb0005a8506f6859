"""Calls between the services: channels, links, encoding of messages, error statuses and the server of a service."""
