"""Records of files, hubs and functions, and the prompts, with recorded responses, that are made of them."""
