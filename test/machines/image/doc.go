// Package image reads container images from OCI layouts. Its test builds the Dockerfile with an
// engine, and compares the images with the images of `make image`.
package image
