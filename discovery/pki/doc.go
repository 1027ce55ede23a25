// Package pki makes the certificates that replicas of nametap-discovery share: the server's
// certificate, and the certificates of the authorities that sign it and that agents trust.
//
//  1. certificates.go has the certificates as one value, and the form of that value in the data of a Secret.
//  2. policy.go decides which certificates are due at a time, and makes their successors.
//
// Replicas renew a certificate after two thirds of its life. Each replica does it at a slightly different time, so one
// of them is the first. The next authority does not replace the previous one: agents trust both authorities, and the
// previous one signs as long as it outlives the certificates that it signs. So agents have years to learn of the next
// authority.
package pki
