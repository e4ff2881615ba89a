"""What is known of the prefix caches of engines: block keys, the index of KV events, the guess from past picks."""
