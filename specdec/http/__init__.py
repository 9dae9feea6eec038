"""HTTP: connections of the API, the router and the side channel, and the client of benchmarks and `top`."""
