package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/discovery/auth"
)

// reviewTimeout bounds one review of a token.
const reviewTimeout = 5 * time.Second

// Reviewer returns a function that asks the API server to which account a token belongs (TokenReview). The function
// refuses a token for another audience.
func (a *Access) Reviewer(audience string) auth.Review {
	return func(ctx context.Context, token string) (auth.Identity, error) {
		ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
		defer cancel()
		review := authenticationv1.TokenReview{
			TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"},
			Spec:     authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{audience}},
		}
		body, err := json.Marshal(review)
		if err == nil {
			body, err = do(ctx, a.client.Post().AbsPath("/apis/authentication.k8s.io/v1/tokenreviews").SetHeader("Content-Type", "application/json").Body(body))
		}
		var result authenticationv1.TokenReview
		if err == nil {
			err = json.Unmarshal(body, &result)
		}
		if err != nil {
			// The API server has not judged the token, for whatever reason.
			return auth.Identity{}, fmt.Errorf("%w: %w%s", auth.ErrUnavailable, err,
				ifRefused(err, ": let nametap-discovery create tokenreviews.authentication.k8s.io, see docs/discovery.md"))
		}
		switch {
		case !result.Status.Authenticated:
			return auth.Identity{}, fmt.Errorf("the token is refused: %s", strings.TrimSpace(result.Status.Error))
		case !slices.Contains(result.Status.Audiences, audience):
			return auth.Identity{}, fmt.Errorf("the token is for %q: want the audience %s", result.Status.Audiences, audience)
		}
		return auth.OfUser(result.Status.User.Username)
	}
}
