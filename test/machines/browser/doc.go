// Package browser tests the page of the fleet in a real browser, Chromium, without a screen.
package browser
