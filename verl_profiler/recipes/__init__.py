"""What `profile-sglang-multi-turn.sh` needs beside verl: data and the tool of GSM8K."""
