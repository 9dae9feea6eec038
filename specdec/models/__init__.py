"""Networks: what a family's config says (spec), the layers it is made of, and the weights that fill them."""
