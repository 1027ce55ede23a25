// Package image reads container images from OCI layouts. Its test builds the Dockerfile with an
// engine, compares the images with the images of `make image`, and runs them.
package image
