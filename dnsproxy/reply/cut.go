package reply

import (
	"github.com/nametap/nametap/dnsproxy/wire"
)

// Cut returns a relayed message that is longer than limit bytes without its records, and with TC set. If the questions
// do not fit either, or are malformed, it leaves them out, too. It does not change a message that fits. The result is in
// the memory of msg, which Cut changes.
func Cut(msg []byte, limit int) []byte {
	if len(msg) <= limit || len(msg) < wire.HeaderLen {
		return msg
	}
	end, err := wire.WalkQuestions(msg)
	counts := [wire.Sections]uint16{uint16(wire.Count(msg, wire.QuestionSection))} //nolint:gosec // the count has 16 bits
	if err != nil || end > limit {
		end, counts = wire.HeaderLen, [wire.Sections]uint16{}
	}
	msg[wire.FlagsOffset] |= wire.TC
	wire.PutCounts(msg, &counts)
	return msg[:end]
}
