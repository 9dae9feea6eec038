"""x"""
class Reach:
    role = "both"
    port = 1
