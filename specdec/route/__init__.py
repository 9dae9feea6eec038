"""`specdec route`: one address before many replicas of `specdec serve`."""
