"""HTTP connections of the API, the router and the side channel, and a client for benchmarks and `top`."""
