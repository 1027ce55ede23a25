// Package machines and the packages below it test nametap on real machines and with real peers:
// a booted systemd, a Kubernetes node, istiod, databases. They need root and more packages and time than
// `make test`, so each has a target of its own in the Makefile, and this module of its own
// keeps their dependencies out of the agent's.
package machines
