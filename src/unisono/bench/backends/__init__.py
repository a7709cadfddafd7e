"""What is measured: our own engine and its peers, each as calls without arguments on buffers."""
