package upstream

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// FuzzJudge judges messages of a server as replies to queries of a client, and restores them.
func FuzzJudge(f *testing.F) {
	reply := bytes.Clone(simQuery)
	reply[2] |= wire.QR
	upper := bytes.Clone(reply)
	copy(upper[wire.HeaderLen:], "\x03WWW")
	bare := bytes.Clone(reply[:wire.HeaderLen])
	bare[3], bare[5] = dns.RcodeRefused, 0
	for _, msg := range [][]byte{reply, upper, bare, reply[:20], append(reply[:wire.HeaderLen:wire.HeaderLen], 0xc0, 12, 0, 1, 0, 1)} {
		f.Add(msg, simQuery)
	}
	f.Add(reply, append(bytes.Clone(simQuery), 0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0))
	f.Fuzz(func(t *testing.T, msg, query []byte) {
		if len(msg) < wire.HeaderLen || len(query) < wire.HeaderLen {
			return
		}
		end, ok := questionEnd(query)
		if !ok {
			return
		}
		question := query[wire.HeaderLen:end]
		before := bytes.Clone(query)
		if wire.EndsInOPT(query) {
			if cut := wire.CutOPT(bytes.Clone(query)); len(cut) < wire.HeaderLen {
				t.Errorf("without OPT: %x", cut)
			}
		}
		if !replies(msg, opcode(query), question) {
			return
		}
		got := restore(bytes.Clone(msg), query, question)
		if !bytes.Equal(got[:2], query[:2]) || len(got) > len(msg)+len(question) {
			t.Errorf("%x is restored to %x", msg, got)
		}
		if isQuery(msg) && (binary.BigEndian.Uint16(got[4:]) > 0) != (len(question) > 0) ||
			binary.BigEndian.Uint16(got[4:]) > 0 && !bytes.HasPrefix(got[wire.HeaderLen:], question) {
			t.Errorf("%x is restored to %x", msg, got)
		}
		if !bytes.Equal(before, query) {
			t.Errorf("the query was changed")
		}
	})
}
