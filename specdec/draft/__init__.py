"""What proposes tokens. Drafters come with speculation; plain decoding needs none."""
