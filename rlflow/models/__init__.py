"""Models as handles of an algorithm: what loads, packs and scores them."""
