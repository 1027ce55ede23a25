// Package birthday has hosts that were chosen for their checksums, as an attacker would choose
// them. The checksum of a table is the sum of its entries' checksums (api/digest), so a
// generalized birthday attack (Wagner, CRYPTO 2002) finds hosts with a wanted sum. It found the
// hosts of SameDigest in a second, and the hosts of Vanishing in half a minute.
package birthday

import (
	"fmt"
	"net/netip"

	"github.com/nametap/nametap/api/digest"
)

// Shard is the shard of all hosts.
const Shard = 7

// A Host is an external host with one address.
type Host struct {
	Name string
	Addr netip.Addr
}

// Vanishing returns hosts whose checksums add up to 0.
func Vanishing() []Host {
	return hosts(
		61162, 47252, 32573, 77057, 128118, 76379, 27162, 41821, 102239, 95309, 62177, 56374, 82175, 23096, 34407, 94995,
		53230, 34491, 80168, 25640, 89778, 20598, 59909, 69113, 58179, 21534, 57405, 71240, 75266, 128240, 31833, 78202,
		122363, 65927, 6959, 109784, 100783, 111867, 110427, 74386, 28839, 46920, 86892, 62160, 65047, 111714, 15266, 61736,
		32404, 77513, 58050, 73459, 5947, 16834, 96628, 106099, 52273, 54226, 66259, 77107, 111372, 28535, 25251, 91392,
		59627, 97678, 27466, 9610, 5542, 26069, 105618, 45452, 84058, 31318, 35558, 44030, 58809, 35804, 92466, 72432,
		62953, 22105, 68550, 95430, 80477, 31833, 867, 127969, 62800, 37054, 127074, 7274, 30209, 14154, 113655, 50163,
		103652, 52725, 18034, 104489, 130510, 89337, 122401, 48824, 101732, 85208, 38886, 54987, 73495, 9689, 105882, 93968,
		44253, 72968, 67839, 103749, 50056, 79879, 49758, 39416, 88599, 12913, 78134, 89988, 63620, 64191, 67048, 94,
	)
}

// SameDigest returns two tables of the same hosts. The tables differ in addresses and checksums, and have the
// same digest.
func SameDigest() (one, other []Host) {
	return hosts(0, 0, 0, 0, 0, 0, 0, 0), hosts(74019, 123076, 59367, 54442, 42455, 107396, 107069, 2531)
}

// hosts returns hosts of the shard that have addresses with these last 32 bits.
func hosts(addrs ...uint32) (all []Host) {
	for i := 0; len(all) < len(addrs); i++ {
		name, a := fmt.Sprintf("h%d.example", i), addrs[len(all)]
		if digest.ShardOf(name) == Shard {
			all = append(all, Host{name, netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 12: byte(a >> 24), byte(a >> 16), byte(a >> 8), byte(a)})})
		}
	}
	return all
}
