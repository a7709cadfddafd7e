"""Commands of `unisono`, one module each. They import what they need when they are run."""
