package auth

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// How long the answer to a review counts.
const (
	reviewedFor = 5 * time.Minute
	refusedFor  = 10 * time.Second // a client that repeats a bad token costs six reviews a minute
)

// maxReviews bounds the tokens that are remembered; each costs about 300 bytes. An agent's token
// lives for hours, and few agents more than --max-clients have one.
const maxReviews = 50_000

// ErrUnavailable says that a token cannot be reviewed now.
var ErrUnavailable = errors.New("the token cannot be reviewed now")

// Review asks whose a token is. It returns an error that wraps [ErrUnavailable] if that
// cannot be found out now, and any other error if the token is refused.
type Review func(ctx context.Context, token string) (Identity, error)

// Tokens remembers reviews of tokens. Its methods are safe for concurrent use.
type Tokens struct {
	review  Review
	now     func() time.Time
	flights singleflight.Group

	mu      sync.Mutex
	answers map[[sha256.Size]byte]answer
}

// An answer is the result of a review.
type answer struct {
	identity Identity
	err      error     // why the token is refused; nil if it is not
	fresh    time.Time // until then it counts without another review
	ends     time.Time // until then it counts while no review is possible; the end of the token
}

// NewTokens returns a Tokens without answers.
func NewTokens(review Review) *Tokens {
	return &Tokens{review: review, now: time.Now, answers: map[[sha256.Size]byte]answer{}}
}

// Identity returns whose a token is. It asks at most once in five minutes. While no review is
// possible, the last answer counts until the token ends.
func (t *Tokens) Identity(ctx context.Context, token string) (Identity, error) {
	key := sha256.Sum256([]byte(token))
	known, ok := t.known(key)
	if ok && t.now().Before(known.fresh) {
		return known.identity, known.err
	}
	got, err, _ := t.flights.Do(string(key[:]), func() (any, error) {
		// The client that asks first may leave; others wait for the same review.
		return t.review(context.WithoutCancel(ctx), token)
	})
	if errors.Is(err, ErrUnavailable) {
		if ok && known.err == nil && t.now().Before(known.ends) {
			return known.identity, nil
		}
		return Identity{}, err
	}
	now := t.now()
	a := answer{err: err, fresh: now.Add(refusedFor)}
	if err == nil {
		a.identity, _ = got.(Identity)
		a.ends = expiry(token)
		a.fresh = now.Add(reviewedFor)
		if !a.ends.IsZero() && a.ends.Before(a.fresh) {
			a.fresh = a.ends
		}
	}
	t.remember(key, a)
	return a.identity, a.err
}

func (t *Tokens) known(key [sha256.Size]byte) (answer, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	a, ok := t.answers[key]
	return a, ok
}

// remember keeps an answer. If there are many, it first drops those that no longer count, or else
// any.
func (t *Tokens) remember(key [sha256.Size]byte, a answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.answers) >= maxReviews {
		now := t.now()
		for other, old := range t.answers {
			if now.After(old.fresh) && now.After(old.ends) {
				delete(t.answers, other)
			}
		}
	}
	for other := range t.answers {
		if len(t.answers) < maxReviews {
			break
		}
		delete(t.answers, other)
	}
	t.answers[key] = a
}

// expiry returns when a token ends according to itself (RFC 7519, section 4.1.4); the zero time if
// it does not say. The API server has checked the token.
func expiry(token string) time.Time {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}
	}
	var claims struct {
		Expires json.Number `json:"exp"`
	}
	if json.Unmarshal(payload, &claims) != nil {
		return time.Time{}
	}
	seconds, err := claims.Expires.Float64()
	if err != nil || seconds <= 0 || seconds > 1<<40 {
		return time.Time{}
	}
	return time.Unix(int64(seconds), 0)
}
