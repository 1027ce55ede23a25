package table

import (
	"net/netip"
	"testing"
)

// FuzzEndpointLabel: a label is read as the address that it is written for, and no other label
// is read as an address.
func FuzzEndpointLabel(f *testing.F) { // D21
	for _, label := range []string{
		"10-244-1-7", "10-244-1-07", "10-244-1", "256-0-0-1", "1-2-3-4-5-6-7-8", "1-2-3--8", "2001-db8--7", "2001-db8--0",
		"2001-db8--", "2001-DB8--7", "2001-db8-0-0-0-0-0-7", "--1", "--0", "db-0", "--ffff-10-0-0-1", "fe80--1%eth0", "---", "",
	} {
		f.Add(label, []byte("\x0a\x00\x00\x01"))
	}
	f.Add("x", []byte("\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, label string, packed []byte) {
		var s Scratch
		if addr, ok := parseDashed(label, &s); ok {
			if written := string(appendDashed(nil, addr.AsSlice())[1:]); written != label {
				t.Errorf("%q is read as %s, whose label is %q", label, addr, written)
			}
		}
		addr, ok := netip.AddrFromSlice(packed)
		if !ok || addr.Is4In6() { // a table has no mapped addresses
			return
		}
		written := appendDashed([]byte("x"), packed)[1:]
		if int(written[0]) != len(written)-1 || len(written)-1 > maxDashed {
			t.Fatalf("the label of %s is % x", addr, written)
		}
		if read, ok := parseDashed(string(written[1:]), &s); !ok || read != addr {
			t.Errorf("the label of %s is %q, which is read as %s, %v", addr, written[1:], read, ok)
		}
	})
}
