package egress

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// initial returns a first packet of QUIC.
func initial(version uint32, to, from string, size int) []byte {
	b := binary.BigEndian.AppendUint32([]byte{0xc3}, version)
	b = append(append(b, byte(len(to))), to...)
	b = append(append(b, byte(len(from))), from...)
	return append(b, make([]byte, max(size-len(b), 0))...)
}

// E19: the answer has the client's connection IDs and only a version that the client did not use.
func TestVersionNegotiation(t *testing.T) {
	t.Parallel()
	for _, version := range []uint32{1, 0x6b3343cf, reservedVersion} {
		want := append([]byte{0xc0, 0, 0, 0, 0, 2}, "me\x04host"...)
		want = binary.BigEndian.AppendUint32(want, map[bool]uint32{false: reservedVersion, true: otherReserved}[version == reservedVersion])
		if got := versionNegotiation(initial(version, "host", "me", 1200)); !bytes.Equal(got, want) {
			t.Errorf("version %x: %x, want %x", version, got, want)
		}
	}
	short := initial(1, "host", "me", 1200)
	short[0] &^= longHeader
	for name, packet := range map[string][]byte{
		"a short packet":       initial(1, "host", "me", 1199),
		"a short header":       short,
		"version negotiation":  initial(0, "host", "me", 1200),
		"an ID beyond its end": append(append(initial(1, "", "", 0)[:5], 255), make([]byte, 200)...),
		"nothing":              nil,
	} {
		if got := versionNegotiation(packet); got != nil {
			t.Errorf("%s: %x, want no answer", name, got)
		}
	}
}

// FuzzVersionNegotiation checks that an answer is shorter than the packet, and is not answered.
func FuzzVersionNegotiation(f *testing.F) {
	f.Add(initial(1, "host", "me", 1200))
	f.Add(initial(1, string(make([]byte, 255)), string(make([]byte, 255)), 1200))
	f.Fuzz(func(t *testing.T, packet []byte) {
		answer := versionNegotiation(packet)
		if answer == nil {
			return
		}
		if len(answer) >= len(packet)/2 {
			t.Errorf("%d bytes for %d", len(answer), len(packet))
		}
		if versionNegotiation(append(answer, make([]byte, minQUIC)...)) != nil {
			t.Error("an answer to an answer")
		}
	})
}
