"""Only measures. README.md beside this file explains each benchmark."""
