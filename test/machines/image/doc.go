// Package image has only a test, which builds the Dockerfile with an engine, and compares the images with those of `make image`.
package image
