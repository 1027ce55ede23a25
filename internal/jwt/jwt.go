// Package jwt reads the times in JSON Web Tokens. It checks no signature: the control plane, or the API server, does.
package jwt

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
)

// Times returns when a token was issued and when it expires (RFC 7519, sections 4.1.6 and 4.1.4). A time is zero if the
// token does not have it, or is no JSON Web Token.
func Times(token string) (issued, expires time.Time) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return issued, expires
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return issued, expires
	}
	var claims struct {
		Issued  float64 `json:"iat"`
		Expires float64 `json:"exp"`
	}
	if json.Unmarshal(payload, &claims) != nil {
		return issued, expires
	}
	return claimed(claims.Issued), claimed(claims.Expires)
}

// claimed returns the time of a claim, in seconds since 1970. It returns the zero time for a claim after the year 9999:
// such a claim is in milliseconds, or means that the token does not expire.
func claimed(seconds float64) time.Time {
	at := time.Unix(int64(min(max(seconds, 0), 1<<60)), 0)
	if seconds <= 0 || at.UTC().Year() > 9999 {
		return time.Time{}
	}
	return at
}
