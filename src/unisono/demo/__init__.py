"""`unisono demo`: the primitives as pictures, faults explained, a race with gloo."""
