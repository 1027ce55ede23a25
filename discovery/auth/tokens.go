package auth

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"

	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/jwt"
)

// reviewedFor is how long a good token counts without another review.
const reviewedFor = 5 * time.Minute

// maxGood is how many good tokens are remembered, each in about 300 bytes. An agent's token lives for hours, and there are
// hardly more agents than --max-clients. If there are more all the same, all are reviewed again. Refused tokens are not remembered: everyone can make up any number of them.
const maxGood = 25_000

// maxReason bounds the reason why a token is refused, in bytes: the API server of another cluster may send any text.
const maxReason = 256

// maxToken bounds a token, in bytes. A service account's token has about 1,000.
const maxToken = 8 << 10

// maxReviews bounds the reviews in flight, and maxTurnWait how long a review waits for others. Clients of an address begin
// few streams in a minute, so they can make up few tokens.
const (
	maxReviews  = 32
	maxTurnWait = 5 * time.Second
)

// ErrUnavailable is returned for a token that cannot be reviewed now.
var ErrUnavailable = errors.New("the token cannot be reviewed now")

// Review returns the identity in a token. It returns an error that wraps [ErrUnavailable] if the token
// cannot be reviewed now, and any other error if the token is refused.
type Review func(ctx context.Context, token string) (Identity, error)

// Tokens remembers reviews of tokens. Its methods are safe for concurrent use.
type Tokens struct {
	review  Review
	flights singleflight.Group
	turns   *semaphore.Weighted // of the reviews in flight, in the order in which they came

	mu   sync.Mutex
	good map[tokenKey]good
}

// A tokenKey is the digest of a token.
type tokenKey = [sha256.Size]byte

// good is a token that a review has accepted.
type good struct {
	identity Identity
	fresh    time.Time // until then the token counts without another review
	ends     time.Time // until then the token counts while no review is possible; the zero time if the token has no end
}

// NewTokens returns a Tokens that remembers no review yet.
func NewTokens(review Review) *Tokens {
	return &Tokens{review: review, turns: semaphore.NewWeighted(maxReviews), good: map[tokenKey]good{}}
}

// Identity returns the identity in a token, and when the token ends; the zero time if that is not known. A good token is
// reviewed at most once in five minutes. While no review is possible, the last answer counts until the token ends.
func (t *Tokens) Identity(ctx context.Context, token string) (Identity, time.Time, error) {
	if len(token) > maxToken {
		return Identity{}, time.Time{}, fmt.Errorf("the token has %d bytes: want a service account's token", len(token))
	}
	key := sha256.Sum256([]byte(token))
	t.mu.Lock()
	known, ok := t.good[key]
	t.mu.Unlock()
	if ok && time.Now().Before(known.fresh) {
		return known.identity, known.ends, nil
	}
	answer, err, _ := t.flights.Do(string(key[:]), func() (any, error) {
		// The client that asks first may leave; other clients wait for the same review.
		return t.reviewInTurn(context.WithoutCancel(ctx), token)
	})
	if errors.Is(err, ErrUnavailable) {
		if ok && time.Now().Before(known.ends) {
			return known.identity, known.ends, nil
		}
		return Identity{}, time.Time{}, err
	}
	if err != nil {
		if text := err.Error(); len(text) > maxReason {
			err = errors.New(clip.Text(text, maxReason))
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.good, key)
		return Identity{}, time.Time{}, err
	}
	identity, _ := answer.(Identity)
	_, expires := jwt.Times(token)
	return identity, t.accept(key, identity, expires), nil
}

// reviewInTurn reviews a token when the reviews before it are done.
func (t *Tokens) reviewInTurn(ctx context.Context, token string) (Identity, error) {
	turn, cancel := context.WithTimeout(ctx, maxTurnWait)
	defer cancel()
	if t.turns.Acquire(turn, 1) != nil {
		return Identity{}, fmt.Errorf("%w: other tokens were before it for %v", ErrUnavailable, maxTurnWait)
	}
	defer t.turns.Release(1)
	return t.review(ctx, token)
}

// accept remembers that a token is good, and returns the time at which the token ends. By the clock of this machine,
// the token may have ended already: the clock of the API server may differ, and the API server accepts tokens for a
// minute after their end. Such a token counts as long as its review counts.
func (t *Tokens) accept(key tokenKey, identity Identity, ends time.Time) time.Time {
	now := time.Now()
	a := good{identity: identity, fresh: now.Add(reviewedFor), ends: ends}
	switch {
	case ends.IsZero():
	case !ends.After(now):
		a.ends = a.fresh
	case ends.Before(a.fresh):
		a.fresh = ends
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.good) >= maxGood {
		maps.DeleteFunc(t.good, func(_ tokenKey, other good) bool { return now.After(other.ends) })
	}
	if len(t.good) >= maxGood {
		clear(t.good)
	}
	t.good[key] = a
	return a.ends
}
