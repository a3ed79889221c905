"""Insert kernels into a model's modules: test what each module computes, replace it, and restore it exactly."""
