"""The model: streams, gates, attention, feed-forward layers and the transformer that joins them."""
