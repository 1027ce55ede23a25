package upstream

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// FuzzJudge reads what a server sends, and what a client does.
func FuzzJudge(f *testing.F) {
	reply := bytes.Clone(simQuery)
	reply[2] |= flagResponse
	upper := bytes.Clone(reply)
	copy(upper[headerLen:], "\x03WWW")
	bare := bytes.Clone(reply[:headerLen])
	bare[3], bare[5] = rcodeRefused, 0
	for _, msg := range [][]byte{reply, upper, bare, reply[:20], append(reply[:headerLen:headerLen], 0xc0, 12, 0, 1, 0, 1)} {
		f.Add(msg, simQuery)
	}
	f.Add(reply, append(bytes.Clone(simQuery), 0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0))
	f.Fuzz(func(t *testing.T, msg, query []byte) {
		if len(msg) < headerLen || len(query) < headerLen {
			return
		}
		end, ok := questionEnd(query)
		if !ok {
			return
		}
		question := query[headerLen:end]
		before := bytes.Clone(query)
		if endsInOPT(query) {
			if cut := cutOPT(bytes.Clone(query)); len(cut) < headerLen {
				t.Errorf("without OPT: %x", cut)
			}
		}
		is := judge(msg, query[2]&opcodeMask, question)
		if is == other {
			return
		}
		mixed := bytes.Clone(question)
		mixCase(mixed)
		if len(question) > 0 && !equalFold(mixed, question) {
			t.Errorf("%x is mixed to %x", question, mixed)
		}
		got := restore(bytes.Clone(msg), query, question)
		if !bytes.Equal(got[:2], query[:2]) || len(got) > len(msg)+len(question) {
			t.Errorf("%x is restored to %x", msg, got)
		}
		if isQuery(msg) && (binary.BigEndian.Uint16(got[4:]) > 0) != (len(question) > 0) ||
			binary.BigEndian.Uint16(got[4:]) > 0 && !bytes.HasPrefix(got[headerLen:], question) {
			t.Errorf("%x is restored to %x", msg, got)
		}
		if !bytes.Equal(before, query) {
			t.Errorf("the query was changed")
		}
	})
}
