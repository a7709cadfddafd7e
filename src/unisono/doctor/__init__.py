"""`unisono doctor`: is this machine fit, and do the primitives work on it?"""
