package push

import "time"

// A record has the times of a session, since the service began; 0 means never. It is guarded by session.mu.
type record struct {
	pushed, acked time.Duration
	nack          nack // the last one
}

// rejected reports whether the last answer was a NACK.
func (r *record) rejected() bool { return r.nack.at > r.acked }

// answered notes an answer to the last push.
func (r *record) answered(now time.Duration, rejected bool, reason string) {
	if rejected {
		r.nack = nack{now, cut(reason)}
		return
	}
	r.acked = now
}

// A nack is a push that was rejected, and when.
type nack struct {
	at     time.Duration
	reason string
}

// maxNacks is how many clients without a stream there may be whose last answer, a NACK, is kept.
const maxNacks = 1 << 10

// keep keeps the NACK of a client whose stream has ended. It drops another one, any, if there are too many.
func (s *streams) keep(id string, last nack) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for other := range s.nacks {
		if len(s.nacks) < maxNacks {
			break
		}
		delete(s.nacks, other)
	}
	s.nacks[id] = last
}

// take returns the NACK of a client, which is not kept any more.
func (s *streams) take(id string) nack {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.nacks[id]
	delete(s.nacks, id)
	return last
}
