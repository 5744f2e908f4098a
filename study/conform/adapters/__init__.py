"""The adapters of this study, as a stranger writes them. Those of DeepSpeed share a file of ours."""
