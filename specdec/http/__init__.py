"""Connections of the HTTP servers: the API, the router and the side channel."""
