"""What the product tells about itself: metrics, and one log line for each request."""
