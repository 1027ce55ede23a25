package auth

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/jwt"
)

func token(name string, expires time.Time) string {
	payload := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"sub":%q,"exp":%d}`, name, expires.Unix()))
	return "e30." + payload + ".c2ln"
}

// pass lets time pass in a bubble of testing/synctest.
func pass(d time.Duration) { time.Sleep(d) } //nolint:forbidigo // the bubble's clock

// shop is the identity in good tokens.
var shop = Identity{"shop", "web"}

// D49: one review per token and five minutes. While the API server is away, an answer counts until
// its token ends.
func TestTokens(t *testing.T) { synctest.Test(t, testTokens) }

func testTokens(t *testing.T) {
	var reviews atomic.Int64
	var failure error // of reviews
	tokens := NewTokens(func(context.Context, string) (Identity, error) {
		reviews.Add(1)
		return shop, failure
	})
	long := token("long", time.Now().Add(time.Hour))
	ask := func(what, token string, wantErr error, wantReviews int64) {
		t.Helper()
		reviews.Store(0)
		got, ends, err := tokens.Identity(t.Context(), token)
		_, expires := jwt.Times(token)
		if !errors.Is(err, wantErr) || err == nil && (got != shop || !ends.Equal(expires)) || reviews.Load() != wantReviews {
			t.Errorf("%s: %v until %v, %v after %d reviews, want %v after %d", what, got, ends, err, reviews.Load(), wantErr, wantReviews)
		}
	}
	ask("the first time", long, nil, 1)
	pass(reviewedFor - time.Second)
	ask("before five minutes", long, nil, 0)
	pass(2 * time.Second)
	ask("after five minutes", long, nil, 1)

	away := fmt.Errorf("connection refused: %w", ErrUnavailable)
	failure = away
	pass(reviewedFor + time.Second)
	ask("while the API server is away", long, nil, 1)
	ask("a new token meanwhile", token("new", time.Now().Add(time.Hour)), ErrUnavailable, 1)
	pass(time.Hour)
	ask("an old answer after the end of its token", long, ErrUnavailable, 1)

	refused := errors.New("refused")
	failure = refused
	ask("refused", long, refused, 1)
	failure = away
	ask("refused before the API server went away", long, ErrUnavailable, 1)

	failure = nil
	short := token("short", time.Now().Add(time.Minute))
	ask("a token that ends soon", short, nil, 1)
	failure = refused
	pass(61 * time.Second)
	ask("after its end", short, refused, 1)

	// The API server accepts a token that has ended by the clock of this machine.
	failure = nil
	if _, ends, err := tokens.Identity(t.Context(), token("clock", time.Now().Add(-time.Hour))); err != nil || !ends.Equal(time.Now().Add(reviewedFor)) {
		t.Errorf("a clock that is ahead: until %v, %v", ends, err)
	}
	failure = errors.New(strings.Repeat("x", 1<<20))
	if _, _, err := tokens.Identity(t.Context(), "text"); err == nil || len(err.Error()) > maxReason+3 {
		t.Errorf("a long reason: %v", err)
	}
	if _, _, err := tokens.Identity(t.Context(), strings.Repeat("x", maxToken+1)); err == nil || errors.Is(err, ErrUnavailable) {
		t.Errorf("a long token: %v", err)
	}
}

// D49: requests with one token at a time share a review, even if the first request is given up.
func TestTokensShareReview(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		released := make(chan struct{})
		var reviews atomic.Int64
		tokens := NewTokens(func(ctx context.Context, _ string) (Identity, error) {
			reviews.Add(1)
			<-released
			return shop, ctx.Err()
		})
		ask := func(ctx context.Context) {
			go func() {
				if got, _, err := tokens.Identity(ctx, "token"); err != nil || got != shop {
					t.Errorf("%v, %v", got, err)
				}
			}()
		}
		first, cancel := context.WithCancel(t.Context())
		ask(first)
		synctest.Wait()
		cancel()
		for range 20 {
			ask(t.Context())
		}
		synctest.Wait()
		close(released)
		synctest.Wait()
		if n := reviews.Load(); n != 1 {
			t.Errorf("%d reviews", n)
		}
	})
}

// D49: tokens that are refused push out no good one, and the good ones are bounded.
func TestTokensAreBounded(t *testing.T) {
	tokens := NewTokens(func(_ context.Context, token string) (Identity, error) {
		if token[0] == 'x' {
			return Identity{}, errors.New("refused")
		}
		return shop, nil
	})
	for i := range maxGood {
		if _, _, err := tokens.Identity(t.Context(), fmt.Sprint("good", i)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 30_000 {
		_, _, _ = tokens.Identity(t.Context(), fmt.Sprint("x", i)) // refused
	}
	tokens.review = func(context.Context, string) (Identity, error) { return Identity{}, errors.New("asked again") }
	for i := range maxGood {
		if _, _, err := tokens.Identity(t.Context(), fmt.Sprint("good", i)); err != nil {
			t.Fatal(err)
		}
	}
	tokens.review = func(context.Context, string) (Identity, error) { return shop, nil }
	for i := range 2*maxGood + 1 {
		_, _, _ = tokens.Identity(t.Context(), fmt.Sprint("more", i)) // accepted
	}
	if n := len(tokens.good); n > maxGood {
		t.Errorf("%d tokens are remembered", n)
	}
}

// D49: few reviews are in flight at a time, in the order in which they came, and a token that is known needs none to be
// accepted.
func TestTokensAreMadeUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inFlight, most atomic.Int64
		tokens := NewTokens(func(_ context.Context, token string) (Identity, error) {
			most.Store(max(most.Load(), inFlight.Add(1)))
			defer inFlight.Add(-1)
			pass(10 * time.Millisecond)
			if strings.HasPrefix(token, "good") {
				return shop, nil
			}
			return Identity{}, errors.New("refused")
		})
		var flood sync.WaitGroup
		for i := range 100 * maxReviews {
			flood.Go(func() { _, _, _ = tokens.Identity(t.Context(), fmt.Sprint("made up ", i)) }) // refused
		}
		synctest.Wait()
		began := time.Now()
		if _, _, err := tokens.Identity(t.Context(), "good"); err != nil || time.Since(began) > time.Second+10*time.Millisecond {
			t.Errorf("after the tokens before it: %v after %v", err, time.Since(began))
		}
		flood.Wait()
		if most.Load() != maxReviews {
			t.Errorf("%d reviews at a time", most.Load())
		}
		for i := range 1000 * maxReviews {
			flood.Go(func() { _, _, _ = tokens.Identity(t.Context(), fmt.Sprint("more ", i)) }) // refused
		}
		synctest.Wait()
		if _, _, err := tokens.Identity(t.Context(), "good"); err != nil {
			t.Errorf("a token that is known: %v", err)
		}
		if _, _, err := tokens.Identity(t.Context(), "good, too"); !errors.Is(err, ErrUnavailable) {
			t.Errorf("a token that waits for others: %v", err)
		}
		flood.Wait()
	})
}
