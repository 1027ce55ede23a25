package hosts

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
)

const (
	first4, last4 = 128, 255 // the second bytes of 240.128.0.0/9
	istiod4       = 240      // of istiod's VIPs, in 240.240.0.0/16
	vips4         = (last4 - first4) * 256 * 254
)

// automaticVIPs returns the automatic VIPs of a host. They depend on the name of the host and on the cluster only, so they
// never change, whatever other hosts there are, and all replicas agree. Nobody can compute them without the key of the
// cluster.
//
// Of 10,000 hosts, about 6 pairs share an IPv4 address. Connections to it lead by the name that the client says, as behind
// a wildcard. If one of the two moved instead, clients that had resolved it would reach the other one.
//
// The addresses are in the ranges of [object.IsVIP], without 240.240.0.0/16, from which istiod gives VIPs, and without
// addresses that end in .0 or .255, which some programs take for addresses of networks.
func automaticVIPs(clusterKey, hostKey string) []netip.Addr {
	mac := hmac.New(sha256.New, []byte(clusterKey))
	_, _ = mac.Write([]byte(hostKey)) // never fails
	sum := mac.Sum(nil)
	n := binary.BigEndian.Uint64(sum) % vips4
	four := [4]byte{240, byte(first4 + n/254/256), byte(n / 254), byte(n%254 + 1)}
	if four[1] >= istiod4 {
		four[1]++
	}
	six := [16]byte{0x20, 0x01, 0, 2}
	copy(six[8:], sum[8:16])
	return []netip.Addr{netip.AddrFrom4(four), netip.AddrFrom16(six)}
}
