"""Replicas of `specdec serve` on Ray Serve: placement, the choice of a replica, and the ingress."""
