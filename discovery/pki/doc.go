// Package pki makes the certificates that replicas of nametap-discovery share: the server's
// certificate, and the certificates of the authorities that sign it and that agents trust.
//
//  1. certificates.go has the certificates as one value, and its form in the data of a Secret.
//  2. policy.go decides what is due at a time. It is a pure function.
//
// Replicas renew a certificate from two thirds of its life on, each at another time, so that one of
// them is first. An authority is not replaced by the next one but joined by it: agents trust both,
// and the old one signs as long as it outlives what it signs. So agents have years to learn of the
// next authority.
package pki
