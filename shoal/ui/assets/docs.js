// URLs are relative, so that the page also works behind a path prefix.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });
